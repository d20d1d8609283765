"""What a plan costs: pure arithmetic, no torch."""
