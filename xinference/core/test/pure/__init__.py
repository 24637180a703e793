"""Pure tests of the control plane."""
