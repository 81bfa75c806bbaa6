"""`python -m normprobe` is the `normprobe` command."""

from normprobe.cli.app import main

if __name__ == "__main__":
    main()
