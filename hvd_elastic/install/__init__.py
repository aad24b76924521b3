"""Check system packages, and build and install the Horovod wheel for this machine.

The module ``prerequisites`` uses only the standard library, since the set-up script imports it
before anything is installed.
"""
