"""The cluster helpers beside what people use in their place, on virtual hosts."""
