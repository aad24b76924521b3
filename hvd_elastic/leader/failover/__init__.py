"""A leader that takes a run over from an earlier one, or gives way to another one."""
