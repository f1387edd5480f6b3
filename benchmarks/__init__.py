"""How fast kvprobe is beside other ways of doing the same, and beside the machine itself."""
