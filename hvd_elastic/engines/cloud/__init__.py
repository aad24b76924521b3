"""Machines of a cloud as hosts: started, kept while they are needed, and ended for good."""
