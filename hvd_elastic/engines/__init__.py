"""What engines that own the machines share: hosts that dial in, and functions as scripts."""
