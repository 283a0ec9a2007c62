"""Many runs from one file: arms and seeds, run one after another, and gone on with."""
