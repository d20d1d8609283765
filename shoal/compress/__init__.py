"""Gradients made smaller on their way between workers, one codec a file; what is lost goes with the next step."""
