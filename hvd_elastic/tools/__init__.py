"""What the cluster tools do: run commands, copy, end processes, check and install on many hosts."""
