"""How well the scaling controller steers real jobs on virtual hosts with emulated devices."""
