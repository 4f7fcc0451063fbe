"""For those who test with, or write plugins for, capture-hooks.

* `strategies`: Hypothesis strategies for points and specs (``st.from_type(CaptureSpec)`` works as well);
* `pytest_plugin`: fixtures, active wherever capture-hooks is installed;
* `contracts`: test classes that a plugin author subclasses for their own anatomy, head or convention;
* `tiny`: tiny random models of many families, built from their configurations.

Importing this package, `strategies`, `pytest_plugin` or `contracts` imports no torch.
"""
