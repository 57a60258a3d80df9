"""Hooks that replace functions of torch's compiler, and the session that installs them.

``_session`` installs and removes the hooks. ``_state`` computes the key of a graph, ``_lookups``
goes through the entries under it, and ``_rebuild`` checks and loads one. ``_compiles`` follows a
compile after a miss, and saves its result.
"""

from s3cache.hooks._bypasses import Bypasses as Bypasses
from s3cache.hooks._compiles import FX_INFO as FX_INFO
from s3cache.hooks._compiles import Compile as Compile
from s3cache.hooks._rebuild import COMPILES_LATER as COMPILES_LATER
from s3cache.hooks._rebuild import LIMITS as LIMITS
from s3cache.hooks._rebuild import LIMITS_FIELD as LIMITS_FIELD
from s3cache.hooks._rebuild import Kernels as Kernels
from s3cache.hooks._rebuild import conditions_of as conditions_of
from s3cache.hooks._rebuild import has_triton as has_triton
from s3cache.hooks._rebuild import settings_of_backward as settings_of_backward
from s3cache.hooks._session import Session as Session
from s3cache.hooks._session import active as active
from s3cache.hooks._session import check as check
from s3cache.hooks._session import disable as disable
from s3cache.hooks._session import enable as enable
from s3cache.hooks._session import enable_by_environment as enable_by_environment
from s3cache.hooks._session import enabled as enabled
from s3cache.hooks._session import register_cacheable as register_cacheable
from s3cache.hooks._state import AOT as AOT
from s3cache.hooks._state import FX as FX
from s3cache.hooks._state import CacheCall as CacheCall
from s3cache.hooks._state import Limits as Limits
from s3cache.hooks._state import Lookup as Lookup
from s3cache.hooks._state import Patches as Patches
from s3cache.hooks._state import Result as Result
from s3cache.hooks._state import Save as Save
from s3cache.hooks._state import around as around
from s3cache.hooks._state import graphs_of as graphs_of
