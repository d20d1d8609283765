"""Gradients meet at K servers, which hold the parameters: in step, or each as it comes."""
