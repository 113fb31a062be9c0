"""Bridges to the training loops of other libraries.

Each module imports the library that it serves, and only users of that library import the module.
This wing may know the names that `offload` itself exports, and nothing behind them. No other wing
imports it.
"""
