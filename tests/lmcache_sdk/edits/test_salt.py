from lmcache_sdk.edits import edit_salt
from lmcache_server.protocol.messages import check_salt


def test_the_salt_of_an_edit_is_the_requests_own() -> None:
    salts = {
        edit_salt("", "a"),
        edit_salt("", "b"),
        edit_salt("a", ""),
        edit_salt("a", "b"),
        edit_salt("ab", "c"),
        edit_salt("a", "bc"),
    }
    assert len(salts) == 6
    assert edit_salt("tenant", "r1") == edit_salt("tenant", "r1")


def test_without_a_request_id_every_salt_is_new() -> None:
    assert edit_salt("tenant") != edit_salt("tenant")


def test_a_salt_is_accepted_wherever_salts_are() -> None:
    salt = edit_salt("tenant/with@anything", "any \0 id")
    check_salt(salt)
    assert len(salt) == 37


def test_the_salt_of_given_arguments_does_not_depend_on_the_process() -> None:
    assert edit_salt("tenant", "r1") == "edit-9044d7070b00871e213a45b08b8578b3"
