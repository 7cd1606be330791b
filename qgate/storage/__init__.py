"""Files and folders of this machine and of buckets, behind names that do not tell which.

`places` turns text into a place, `files` writes whole files and locks them, `folders` reads and
writes the files of a folder by name. Nothing outside asks whether a place is a path or a URL.
"""
