"""Xavier: replicas of one model on one host share the KV blocks they have computed.

The folders form a line; a file imports from its own folder and from those to its left:

    block <- policy, directory <- store <- transfer <- connector

``config`` and ``errors`` sit below all of them. Nothing here imports the rest of xinference.
"""
