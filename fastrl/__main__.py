"""`python -m fastrl`: print versions and, for each backend, whether it is usable or why not."""

from fastrl.doctor import main

if __name__ == "__main__":
    main()
