"""How bytes move: movers between engine blocks and slabs, the helper thread that drives them, and the peers it reads from."""
