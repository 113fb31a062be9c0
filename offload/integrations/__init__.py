"""Bridges to the training loops of other libraries.

Each module imports the library that it serves, and only users of that library import the module.
This wing may know the optimizer, and every value that the optimizer returns. No other wing imports
it.
"""
