"""SimPy driver, metrics, sweeps and figures."""
