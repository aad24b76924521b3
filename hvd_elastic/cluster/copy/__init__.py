"""A file or folder to many hosts (``copyclust``)."""
