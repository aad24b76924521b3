"""Copy a file or folder to many hosts (``copyclust``)."""
