"""Fits of stage times to logs and profiles: maximum a posteriori, robust, with intervals."""
