"""What a fork server imports first: it dies with its parent, and the processes it forks with it."""

from tests.dying import die_with_parent, let_forks_die

die_with_parent()
let_forks_die()
