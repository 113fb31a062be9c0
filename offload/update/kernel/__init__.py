"""The C++ update kernel: its sources, and the libraries that the build hook compiles of them."""
