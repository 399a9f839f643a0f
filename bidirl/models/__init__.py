"""Hardware and model catalogue, stage-time functions, memory and calibration."""
