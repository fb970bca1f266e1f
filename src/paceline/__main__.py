"""`python -m paceline` is `paceline`, but for how large gradients are copied (`paceline_start`)."""

from paceline.cli import main

if __name__ == "__main__":
    main()
