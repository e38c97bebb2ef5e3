"""Makes the batch normalization of an existing net synchronized, or stock again."""

from ._report import Entry as Entry
from ._report import Report as Report
