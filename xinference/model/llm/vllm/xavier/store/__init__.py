"""The tiers that hold blocks: a segment's places under a policy's books, behind one lock."""
