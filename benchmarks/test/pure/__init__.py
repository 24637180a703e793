"""Pure tests of the list of guards."""
