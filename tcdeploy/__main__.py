"""Makes `python -m tcdeploy` equivalent to `tcdeploy`."""

from tcdeploy.cli.app import main

if __name__ == "__main__":
    main()
