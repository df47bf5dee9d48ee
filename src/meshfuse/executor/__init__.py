"""Running host programs: on simulated ranks in this process, or on real ones."""
