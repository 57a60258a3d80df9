"""What more than one folder of tests uses. No test lies here.

* :mod:`~tests.support.marks`: marks of slow and nightly tests, and cases that have them;
* :mod:`~tests.support.compiled`: what g++ makes for Inductor, kept for all machines and later runs;
* :mod:`~tests.support.machines`: jobs of the compile cache, each in a process on a fresh machine;
* :mod:`~tests.support.warm`: real compiles through a bucket, cold and warm;
* :mod:`~tests.support.trials`: programs as they are, watched from outside, on such machines;
* :mod:`~tests.support.beside`: what may never be worse than with torch alone;
* :mod:`~tests.support.watch`: graphs lowered and processes started in this process;
* :mod:`~tests.support.sites`: a remote with such machines, as a fixture;
* :mod:`~tests.support.processes`: processes that save and look up until a test kills them,
  :mod:`~tests.support.worker` is what runs in them;
* :mod:`~tests.support.served`: a server, a bad link to it and machines, as fixtures;
* :mod:`~tests.support.caching`: small entries, and caches over any store;
* :mod:`~tests.support.stores`: stores that do not do as told;
* :mod:`~tests.support.shelves`: a store with entries of many kinds, and damaged ones;
* :mod:`~tests.support.scripts`: Python code in a process of its own;
* :mod:`~tests.support.waiting`: until something holds, until a thread or a child ends;
* :mod:`~tests.support.locks`: every lock there is in an object;
* :mod:`~tests.support.moments`: something happens between two file system calls;
* :mod:`~tests.support.users`: other users of the machine;
* :mod:`~tests.support.hanging`: file systems that hang;
* :mod:`~tests.support.proxy`: a bad link to a server, :mod:`~tests.support.gate`: a gate before it;
* :mod:`~tests.support.scripted`: an S3 server that answers what it is told to;
* :mod:`~tests.support.buckets`: buckets, which s3cache itself never makes;
* :mod:`~tests.support.clock`: a clock that moves when it is told to;
* :mod:`~tests.support.switches`: settings of torch, and how they were before;
* :mod:`~tests.support.compiler`: torch's compiler, imported without a word;
* :mod:`~tests.support.environment`: nothing of the developer's own, as a fixture;
* :mod:`~tests.support.descriptions`: whether a description says what torch's object says;
* :mod:`~tests.support.runs`: what a job has recorded of its lookups;
* :mod:`~tests.support.frames`: frames that are made by hand and may say anything;
* :mod:`~tests.support.forging`: signed frames, and what forgers make of them;
* :mod:`~tests.support.imports`, :mod:`~tests.support.pages`: what is imported, what pages show;
* :mod:`~tests.support.observe`: what a program's caller can see of tensors.
"""
