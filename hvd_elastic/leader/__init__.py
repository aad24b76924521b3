"""The leader of a run: carries out the decisions of :mod:`hvd_elastic.control`."""
