"""Random training programs, run on this library and on plain torch, and compared to the bit.

`program` makes a program from a seed and a number; `interpret` runs it on both sides; `runner` runs
many, each in a process of its own, and drops operations of one that fails until it is short.
``python -m tests.fuzz --help`` says how to run them.
"""
