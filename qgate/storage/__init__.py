"""Files and folders of this machine and of buckets, behind one set of names.

`locations` turns text into a location, `access` opens folders and writes whole files, `files` locks
and replaces files of this machine. Nothing outside asks whether a location is a path or a URL.
"""
