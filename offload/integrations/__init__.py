"""Other people's training loops.

Each module here imports the library that it is for, and is imported by those who use that library.
"""
