"""Looking at a run from outside: what a training process has left in its store, for people.

This wing may know `checkpoint`, `format` and `units`. It reads, never imports torch, and nothing
that training needs depends on it.
"""
