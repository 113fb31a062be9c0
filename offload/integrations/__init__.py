"""Other people's training loops.

Each module here imports the library that it is for, and is imported by those who use that library.
This wing may know the optimizer, and what the optimizer gives out. Nothing else imports it.
"""
