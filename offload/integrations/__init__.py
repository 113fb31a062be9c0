"""Other people's training loops.

Each module here imports the library that it is for, and is imported by those who use that library.
This wing may know what `offload` itself exports, and nothing behind it. Nothing else imports it.
"""
