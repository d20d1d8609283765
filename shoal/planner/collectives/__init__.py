"""What each way to exchange bytes among workers costs: the textbook."""
