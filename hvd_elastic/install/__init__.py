"""What an installation is made of: system packages, and the Horovod wheel built on this machine.

Standard library and ``packaging`` only: the set-up imports this before anything is installed.
"""
