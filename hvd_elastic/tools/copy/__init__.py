"""Copy a file or folder to many hosts (``copyclust``).

The way of a byte from the leader's disk to the last host's:

1. ``copying`` checks what is asked and starts a ``session``: a node process on every host over ssh,
   and one for the source. The leader itself carries no data; ``chain`` decides which node feeds
   which.
2. On the hosts ``programs/copy`` runs. Its ``comparison`` finds out what a destination lacks.
3. ``feed`` of the source reads the byte, hashes it, compresses it where that pays, keeps to
   ``--bwlimit``, and sends it as part of a frame.
4. ``frames`` carries frames between nodes over TLS, with a certificate made for this copy
   (``hosts/certificate.py``).
5. ``node`` of the destination takes the frame; ``store`` writes it into a part file.
   Its own feeder sends the frame on to the next host, from memory while it is recent.
6. When a file is complete and its SHA-256 is right, ``renaming`` waits until it is on the disk
   and gives it its name.

With ``--pull`` the hosts fetch shares of a shared store themselves and then exchange them in the
same way (``pulling_session``).
"""
