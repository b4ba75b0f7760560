import sys

from stepsaver.cli import main

sys.exit(main())
