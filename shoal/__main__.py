"""`python -m shoal`: the same as the command `shoal`."""

from shoal.cli.main import command

if __name__ == "__main__":
    command()
