"""Tables of text: bytes become rows (`text`), columns get their roles (`columns`), texts become
times (`times`)."""
