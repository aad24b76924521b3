"""Programs for a host's own python3 (3.7 or newer), and modules that they share with the package.

What is sent to a host imports the standard library and its kind only; ``peers`` also takes
``errors`` and ``own_files`` of the package along. ``dial_back`` and its ``secure_stream`` are not
sent: an engine starts them with the package's own interpreter.
"""
