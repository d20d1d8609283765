"""The mode "deadline": a step goes on with those who are there in time; who comes late joins a later one.

listing decides who takes part, limit how long a step waits by itself, board has the store agree on it, summing sums
among those who are listed, catching_up brings the late ones to where the others are, and mode does a step of it all.
"""
