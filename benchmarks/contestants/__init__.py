"""Ways of running a sweep; one file each."""
