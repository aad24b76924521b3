"""What an installation is made of: system packages, and the Horovod wheel built on this machine.

Standard library only where the set-up imports it (``prerequisites``): it runs before anything is
installed.
"""
