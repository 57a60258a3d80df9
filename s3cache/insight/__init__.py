"""Explain misses, report lookups, and check an installation (:func:`examine` is the doctor)."""

from s3cache.insight._doctor import Check as Check
from s3cache.insight._doctor import Name as Name
from s3cache.insight._doctor import examine as examine
from s3cache.insight._explain import Difference as Difference
from s3cache.insight._explain import Explained as Explained
from s3cache.insight._explain import Explanation as Explanation
from s3cache.insight._explain import differences as differences
from s3cache.insight._explain import explain as explain
from s3cache.insight._report import duration as duration
from s3cache.insight._report import is_counted as is_counted
from s3cache.insight._report import manifest as manifest
from s3cache.insight._report import name_of as name_of
from s3cache.insight._report import names_of as names_of
from s3cache.insight._report import page as page
from s3cache.insight._report import sum_up as sum_up
from s3cache.insight._report import trace as trace
from s3cache.insight._report import with_name as with_name
