"""Heads of files as their publishers have them, and as people's programs write them: each comes in
by the one door, unchanged, as what it means; or is refused with the option that decides."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from device_sdk.interactions import InteractionsError, read_interactions
from device_sdk.tables.text import Reading

Pairs = list[tuple[str, str]]

# Each user's items oldest first, users as they appear in the order of time.
PUBLISHED: dict[str, tuple[bytes, dict[str, list[str]]]] = {
    "MovieLens 100K, u.data": (
        b"196\t242\t3\t881250949\n186\t302\t3\t891717742\n196\t51\t2\t881250001\n",
        {"196": ["51", "242"], "186": ["302"]},
    ),
    "MovieLens 1M, ratings.dat": (
        b"1::1193::5::978300760\n1::661::3::978302109\n1::914::3::978301968\n2::1::4::978300000\n",
        {"1": ["1193", "914", "661"], "2": ["1"]},
    ),
    "MovieLens latest, ratings.csv": (
        b"userId,movieId,rating,timestamp\r\n1,31,2.5,1260759144\r\n1,1029,3.0,1260759179\r\n"
        b"1,1061,3.0,1260759100\r\n",
        {"1": ["1061", "31", "1029"]},
    ),
    "MovieLens HetRec, user_ratedmovies.dat": (
        b"userID\tmovieID\trating\tdate_day\tdate_month\tdate_year\tdate_hour\tdate_minute\t"
        b"date_second\r\n75\t3\t1\t29\t10\t2006\t23\t17\t16\r\n75\t32\t4.5\t29\t10\t2006\t23\t17\t1"
        b"\r\n75\t110\t4\t2\t9\t2006\t23\t30\t8\r\n",
        {"75": ["110", "32", "3"]},
    ),
    "Last.fm HetRec, user_artists.dat": (
        b"userID\tartistID\tweight\n2\t51\t13883\n2\t52\t11690\n3\t51\t5\n",
        {"2": ["51", "52"], "3": ["51"]},
    ),
    "Last.fm HetRec, user_taggedartists.dat": (
        b"userID\tartistID\ttagID\tday\tmonth\tyear\n2\t52\t13\t1\t4\t2009\n2\t51\t15\t1\t3\t2009\n",
        {"2": ["51", "52"]},
    ),
    "Last.fm 1K": (
        b"user_000001\t2009-05-04T23:08:57Z\tf1b1cf71\tDeep Dish\t\tFuck Me Im Famous\n"
        b'user_000001\t2009-05-04T13:54:10Z\ta7f7df4a\t"Weird Al" Yankovic\t\tEat It\n'
        b'user_000002\t2006-08-13T13:59:20Z\t\t"Heroes\t\tComposition 0919\n'
        b"user_000002\t2006-08-13T13:58:20Z\t09a114d9\t\xe5\x9d\x82\xe6\x9c\xac\t\tx\n",
        {"user_000001": ["a7f7df4a", "f1b1cf71"], "user_000002": ["09a114d9"]},
    ),
    "Amazon 2014, ratings only": (
        b"A39HTATAQ9V7YF,0205616461,5.0,1369699200\nA3JM6GV9MNOF9X,0558925278,3.0,1355443200\n"
        b"A3JM6GV9MNOF9X,B00005N7P0,5.0,1155443200\n",
        {"A39HTATAQ9V7YF": ["0205616461"], "A3JM6GV9MNOF9X": ["B00005N7P0", "0558925278"]},
    ),
    "Amazon 2023, ratings only": (
        b"user_id,parent_asin,rating,timestamp\nAGKH,B00YQ6X8EO,5.0,1588687728923\n"
        b"AGKH,B081TJ8YS3,4.0,1588615855070\n",
        {"AGKH": ["B081TJ8YS3", "B00YQ6X8EO"]},
    ),
    "Amazon 2023, with histories": (
        b"user_id,parent_asin,rating,timestamp,history\nAGKH,B00YQ6X8EO,5.0,1588687728923,"
        b"B1 B2\nAGKH,B081TJ8YS3,4.0,1588615855070,\n",
        {"AGKH": ["B081TJ8YS3", "B00YQ6X8EO"]},
    ),
    "RecBole, ml-100k.inter": (
        b"user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        b"196\t242\t3\t881250949\n196\t302\t3\t8.81250940E8\n",
        {"196": ["302", "242"]},
    ),
    "RecBole, of artists": (
        b"user_id:token\tartist_id:token\tweight:float\n2\t51\t13883.0\n2\t52\t11690.0\n",
        {"2": ["51", "52"]},
    ),
    "Book-Crossing, BX-Book-Ratings.csv": (
        b'"User-ID";"ISBN";"Book-Rating"\r\n"276725";"034545104X";"0"\r\n'
        b'"276726";"0155061224";"5"\r\n"276726";"\\"0446520802";"0"\r\n"276727";"M\xfcnch";"8"\r\n',
        {"276725": ["034545104X"], "276726": ["0155061224", '"0446520802'], "276727": ["Münch"]},
    ),
    "Steam, steam-200k.csv": (
        b'151603712,"The Elder Scrolls V Skyrim",purchase,1.0,0\n'
        b'151603712,"The Elder Scrolls V Skyrim",play,273.0,0\n'
        b'151603712,"Warhammer 40,000",play,1.0,0\n',
        {"151603712": ["The Elder Scrolls V Skyrim", "Warhammer 40,000"]},
    ),
    "Taobao, UserBehavior.csv": (
        b"1,2268318,2520377,pv,1511544070\n1,2333346,2520771,pv,1511561733\n"
        b"1,2576651,149192,buy,1511500000\n",
        {"1": ["2576651", "2268318", "2333346"]},
    ),
    "RetailRocket, events.csv": (
        b"timestamp,visitorid,event,itemid,transactionid\n1433221332117,257597,view,355908,\n"
        b"1433221332000,257597,view,248676,\n",
        {"257597": ["248676", "355908"]},
    ),
    "Diginetica, whose strangers are NA": (
        b"sessionId;userId;itemId;timeframe;eventdate\n1;NA;81766;526309;2016-05-09\n"
        b"2;7;31331;1031018;2016-05-09\n",
        {"7": ["31331"]},
    ),
    "YooChoose, clicks.dat": (
        b"1,2014-04-07T10:51:09.277Z,214536502,0\n1,2014-04-07T10:50:00.000Z,214536500,0\n",
        {"1": ["214536500", "214536502"]},
    ),
    "UCI Online Retail": (
        b"InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country\n"
        b"536365,85123A,HEART T-LIGHT,6,12/1/2010 8:26,2.55,17850,United Kingdom\n"
        b"536366,71053,WHITE METAL,6,12/13/2010 8:20,3.39,17850,United Kingdom\n"
        b"536367,71054,NOBODY,6,12/13/2010 8:20,3.39,,United Kingdom\n",
        {"17850": ["85123A", "71053"]},
    ),
    "MovieTweetings, ratings.dat": (
        b"1::0111161::10::1373234211\n1::0117060::7::1372723544\n",
        {"1": ["0117060", "0111161"]},
    ),
    "goodbooks-10k": (
        b"user_id,book_id,rating\n1,258,5\n2,4081,4\n",
        {"1": ["258"], "2": ["4081"]},
    ),
    "Yelp reviews": (
        b"review_id,user_id,business_id,stars,text,date\n"
        b'r1,u1,b1,5.0,"If you decide, ""go"".\n\nTwice.",2018-07-07 22:09:11\n'
        b"r2,u1,b2,3.0,ok,2016-03-09 20:56:38\n",
        {"u1": ["b2", "b1"]},
    ),
    "numbers in columns between blanks": (
        b"196 242 3 881250949\n186 302 3 891717742\n",
        {"196": ["242"], "186": ["302"]},
    ),
}

WRITTEN: dict[str, tuple[bytes, dict[str, list[str]]]] = {
    "a line break in quotes": (
        b'user_id,item_id,review\nanna,f1,"good,\nbut, long"\nbert,f2,"fine"\n',
        {"anna": ["f1"], "bert": ["f2"]},
    ),
    "U+2028, and a comma that nobody quoted": (
        "user,item,title\nanna,f1,Part one\u2028Part, two\nbert,f2,x\n".encode(),
        {"anna": ["f1"], "bert": ["f2"]},
    ),
    "vertical tab, form feed, and other ends of lines that are none": (
        "user,item,title\nanna,f1,a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2029h\nbert,f2,x\n".encode(),
        {"anna": ["f1"], "bert": ["f2"]},
    ),
    "a mark, and CRLF": (
        "\ufeffuser,item\r\nanna,f1\r\nbert,f2\r\n".encode(),
        {"anna": ["f1"], "bert": ["f2"]},
    ),
    "a mark before quotes, and one in the middle": (
        '\ufeff"user";"item"\n"anna";"f1"\n\ufeff"bert";"f2"\n'.encode(),
        {"anna": ["f1"], "bert": ["f2"]},
    ),
    "a mark without a header": ("\ufeffanna,f1\n".encode(), {"anna": ["f1"]}),
    "UTF-16": ("user\titem\nzoé\tf1\n".encode("utf-16"), {"zoé": ["f1"]}),
    "UTF-16 without a mark": ("user\titem\nzoé\tf1\n".encode("utf-16-le"), {"zoé": ["f1"]}),
    "UTF-16, the other way round": ("user\titem\nzoé\tf1\n".encode("utf-16-be"), {"zoé": ["f1"]}),
    "UTF-32": ("user\titem\nzoé\tf1\n".encode("utf-32"), {"zoé": ["f1"]}),
    "Latin-1": ("zoé,café\n".encode("latin-1"), {"zoé": ["café"]}),
    "Windows' Latin-1": ("user,item\nanna,It\u2019s\n".encode("cp1252"), {"anna": ["It\u2019s"]}),
    "gzip": (gzip.compress(b"user,item\nanna,f1\n", mtime=0), {"anna": ["f1"]}),
    "lines of old Macs": (b"user,item\ranna,f1\rbert,f2\r", {"anna": ["f1"], "bert": ["f2"]}),
    "an export of Excel's": (b"sep=;\r\nUser ID;Item ID\r\nanna;f1\r\n", {"anna": ["f1"]}),
    "an index of pandas'": (b",user_id,item_id\n0,anna,f1\n", {"anna": ["f1"]}),
    "items first": (b"item_id,user_id\nf1,anna\nf2,anna\n", {"anna": ["f1", "f2"]}),
    "ids and names": (
        b'user_id,user_name,item_id,title,rating\n1,Anna,7,"Godfather, The",5\n',
        {"1": ["7"]},
    ),
    "comments": (b"# of today\n%\nanna,f1\nanna,f2\nanna,f3\n", {"anna": ["f1", "f2", "f3"]}),
    "a header behind a number sign": (b"#user\titem\nanna\tf1\n", {"anna": ["f1"]}),
    "two files put together": (
        b"user,item\nanna,f1\nuser,item\nbert,f2\n",
        {"anna": ["f1"], "bert": ["f2"]},
    ),
    "rows without an item, or cut off": (
        b"user,item,time\nanna,f1,2\nanna,,3\n,f2,4\nanna,NULL,5\n\nanna,f3,1\nanna,f",
        {"anna": ["f3", "f1"]},
    ),
    "repeats": (b"1,5,3,100\n1,5,4,200\n1,6,4,150\n", {"1": ["6", "5"]}),
    "times of several programs": (
        b"user,item,viewed_at\nanna,f1,2024-01-02 10:00:00+02:00\nanna,f2,2024-01-02T08:30:00Z\n"
        b"anna,f3,2024-01-02 07:59\nanna,f4,\n",
        {"anna": ["f4", "f3", "f1", "f2"]},
    ),
    "days before months": (
        b"user,item,date\nanna,f1,02/01/2024\nanna,f2,13/01/2024\nanna,f3,01/02/2024\n",
        {"anna": ["f1", "f2", "f3"]},
    ),
    "separators at the ends of rows": (
        b"user,item\nanna,f1,\nbert,f2,\n",
        {"anna": ["f1"], "bert": ["f2"]},
    ),
    "Amazon 2014, reviews": (
        b"reviewerID,asin,overall,unixReviewTime,reviewTime\n"
        b'A1,B1,5,1369699200,"05 28, 2013"\nA1,B2,5,1369612800,"05 27, 2013"\n',
        {"A1": ["B2", "B1"]},
    ),
    "quotes behind a space": (
        b'user, item\nanna, "Warhammer 40,000"\nbert, Portal\n',
        {"anna": ["Warhammer 40,000"], "bert": ["Portal"]},
    ),
    "titles in quotes that are text": (
        b'u1\t"Heroes"\nu1\t"Weird Al" Yankovic\nu1\tLow\nu2\t"open\n',
        {"u1": ['"Heroes"', '"Weird Al" Yankovic', "Low"], "u2": ['"open']},
    ),
    "a day and a time of day": (
        b"user,item,order_date,order_time\nanna,f1,2024-01-02,10:30\nanna,f2,2024-01-02,9:45:10\n",
        {"anna": ["f2", "f1"]},
    ),
    "decimal commas": (b"anna;f1;4,5\nbert;f2;3,0\n", {"anna": ["f1"], "bert": ["f2"]}),
    "an end of files of old": (b"user,item\nanna,f1\n\x1a", {"anna": ["f1"]}),
    "seconds beside thousandths of them": (
        b"user,item,timestamp\nanna,f1,1700000000\nanna,f2,1600000000000\nanna,f3,1650000000\n"
        b"anna,f4,0\n",
        {"anna": ["f4", "f2", "f3", "f1"]},
    ),
    "dates beside thousandths of seconds": (
        b"user,item,time\nanna,f1,2024-01-02T08:30:00Z\nanna,f2,1600000000000\nanna,f3,\n",
        {"anna": ["f3", "f2", "f1"]},
    ),
    "dates without anything between, beside others": (
        b"user,item,date\nanna,f1,20200105\nanna,f2,2019-12-31\nanna,f3,45000\n",
        {"anna": ["f3", "f2", "f1"]},
    ),
    "numbers with gaps": (
        b"user,item,time\nanna,f1,5\nanna,f2,NULL\nanna,f3,4\n",
        {"anna": ["f2", "f3", "f1"]},
    ),
    "titles with commas": (
        b"anna\tGodfather, The\nbert\tCrying, Whispers\n",
        {"anna": ["Godfather, The"], "bert": ["Crying, Whispers"]},
    ),
    "hours of one figure": (
        b"user,item,date\nanna,f1,2024-01-05 10:05\nanna,f2,2024-01-05 9:05\n",
        {"anna": ["f2", "f1"]},
    ),
    "nobody, as Python and a spreadsheet write it": (
        b"user,item\nNone,f1\n#N/A,f2\nanna,f3\n",
        {"anna": ["f3"]},
    ),
    "thousandths of seconds": (
        b"user,item,ts\nanna,f1,1700000000002\nanna,f2,1700000000001\n",
        {"anna": ["f2", "f1"]},
    ),
    "times as mails have them, of several zones": (
        b'user_id,item_id,time\nanna,f1,"Wed, 31 Jan 2024 10:00:00 +0100"\n'
        b'anna,f2,"Wed, 31 Jan 2024 09:30:00 +0000"\n',
        {"anna": ["f1", "f2"]},
    ),
    "a number of 5,000 figures": (
        b"anna,f1,5,2\nanna,f2,4,1\nbert,f1,5," + b"1" * 5000 + b"\n",
        {"anna": ["f2", "f1"], "bert": ["f1"]},
    ),
}


def by_user(data: bytes, folder: Path, reading: Reading | None = None) -> dict[str, list[str]]:
    path = folder / "views"
    path.write_bytes(data)
    found: dict[str, list[str]] = {}
    for user, item in read_interactions(path, reading).pairs():
        found.setdefault(user, []).append(item)
    return found


@pytest.mark.parametrize(
    ("data", "expected"), (PUBLISHED | WRITTEN).values(), ids=PUBLISHED | WRITTEN
)
def test_files_go_in_as_published_and_as_programs_write_them(
    tmp_path: Path, data: bytes, expected: dict[str, list[str]]
) -> None:
    assert by_user(data, tmp_path) == expected


# What may mean several things: what is asked, and what an answer gives.
AMBIGUOUS: dict[str, tuple[bytes, str, Reading, dict[str, list[str]]]] = {
    "times of day without a day": (
        b"anna,f1,10:30\nanna,f2,09:15\n",
        "column 3 hold times, or parts of them.*time=none",
        Reading({"user": "1", "item": "2", "time": "none"}),
        {"anna": ["f1", "f2"]},
    ),
    "a day and a time of day without a header": (
        b"anna,f1,2024-01-02,10:30\nanna,f2,2024-01-01,11:15\n",
        "column 3 and column 4 hold times",
        Reading({"user": "1", "item": "2", "time": "3"}),
        {"anna": ["f2", "f1"]},
    ),
    "a day and figures": (
        b"user,item,date,time\nanna,f1,2024-01-02,1030\nanna,f2,2024-01-03,0915\n",
        "'date' holds dates, and 'time' what is no time by itself, such as '1030'",
        Reading({"time": "date"}),
        {"anna": ["f1", "f2"]},
    ),
    "several items in a cell": (
        b"anna\tf1,f2,f3\nbert\tf2,f4\n",
        "column 2, such as 'f1,f2,f3', seem to hold several items each",
        Reading({"item": "2"}),
        {"anna": ["f1,f2,f3"], "bert": ["f2,f4"]},
    ),
    "RecBole's sequences": (
        b"user_id:token\titem_id:token_seq\n1\ta b c\n2\ta d\n",
        "item_id:token_seq, such as 'a b c', seem to hold several items each",
        Reading({"item": "item_id:token_seq"}),
        {"1": ["a b c"], "2": ["a d"]},
    ),
    "a header in words that are not known": (
        b"Kunde,Artikel\nanna,f1\nbert,f2\n",
        "Kunde, Artikel, seems to be a header.*--columns user=NAME,item=NAME",
        Reading({"user": "Kunde", "item": "Artikel"}),
        {"anna": ["f1"], "bert": ["f2"]},
    ),
    "a first row that is no header": (
        b"anna,x\nbert,f1\ncleo,f2\n",
        "user=1,item=2 where it is no header",
        Reading({"user": "1", "item": "2"}),
        {"anna": ["x"], "bert": ["f1"], "cleo": ["f2"]},
    ),
    "a header over one row": (
        b"Kunde,Artikel,Sterne\n1,2,3\n",
        "Kunde, Artikel, Sterne, seems to be a header",
        Reading({"user": "Kunde", "item": "Artikel"}),
        {"1": ["2"]},
    ),
    "half a header": (
        b"user_id,thing\nanna,f1\n",
        "--columns user=NAME,item=NAME",
        Reading({"item": "thing"}),
        {"anna": ["f1"]},
    ),
    "a matrix of users and items": (
        b"user,f1,f2,f3\nanna,1,0,1\nbert,0,1,0\n",
        "user, f1, f2, f3, seems to be a header",
        Reading({"user": "user", "item": "f2"}),
        {"anna": ["0"], "bert": ["1"]},
    ),
    "a noun over words": (
        b"name,movie\nanna,Heat\nbert,Alien\n",
        "name, movie, seems to be a header",
        Reading({"user": "name"}),
        {"anna": ["Heat"], "bert": ["Alien"]},
    ),
    "two kinds of items": (
        b"user_id,artist_id,track_id\nanna,a1,t1\n",
        "'artist_id' and 'track_id' may each be the item's.*--columns item=artist_id",
        Reading({"item": "track_id"}),
        {"anna": ["t1"]},
    ),
    "times under another name": (
        b"user,item,gesehen\nanna,f1,2024-01-02\nanna,f2,2024-01-01\n",
        "'gesehen' holds times.*--columns time=gesehen .*time=none",
        Reading({"time": "gesehen"}),
        {"anna": ["f2", "f1"]},
    ),
    "times that are another's": (
        b"user,item,listed\nanna,f1,2024-01-02\nanna,f2,2024-01-01\n",
        "time=none",
        Reading({"time": "none"}),
        {"anna": ["f1", "f2"]},
    ),
    "days or months": (
        b"user,item,date\nanna,f1,02/01/2024\nanna,f2,01/03/2024\n",
        "may be of %d/%m/%Y or of %m/%d/%Y.*--time-format",
        Reading(time_format="%m/%d/%Y"),
        {"anna": ["f2", "f1"]},
    ),
    "two separators": (
        b"a;b,x\na;c,y\n",
        "comma and by semicolon; --separator comma or --separator semicolon",
        Reading(separator="comma"),
        {"a;b": ["x"], "a;c": ["y"]},
    ),
    "none": (
        b"anna f1\nbert f2\n",
        "no columns found in lines such as 'anna f1'.*--separator",
        Reading(separator="space"),
        {"anna": ["f1"], "bert": ["f2"]},
    ),
    "items before users, by the codes": (
        b"B000052YAN,A1XQ1JWXRDXXNB,5.0,1390003200\nB0000531EN,A2IZ7V4EFBVTQW,4.0,1391000000\n",
        "column 1 holds ASINs.*--columns",
        Reading({"user": "2", "item": "1", "time": "4"}),
        {"A1XQ1JWXRDXXNB": ["B000052YAN"], "A2IZ7V4EFBVTQW": ["B0000531EN"]},
    ),
    "items before the one user": (
        b"f1,anna\nf2,anna\nf3,anna\n",
        "the one item 'anna'.*swapped.*--columns",
        Reading({"user": "2", "item": "1"}),
        {"anna": ["f1", "f2", "f3"]},
    ),
    "what was done in the place of the item": (
        b"anna,view,f1\nanna,buy,f2\n",
        "column 2 says what was done.*--columns",
        Reading({"user": "1", "item": "3"}),
        {"anna": ["f1", "f2"]},
    ),
    "ratings in the place of the item": (
        "".join(f"u{n % 7},{n % 5},i{n}\n" for n in range(60)).encode(),
        "column 2 has 5 values.*column 3 many.*--columns",
        Reading({"user": "1", "item": "3"}),
        {f"u{m}": [f"i{n}" for n in range(60) if n % 7 == m] for m in range(7)},
    ),
    "places of check-ins by coordinates": (
        b"0\t2010-10-19T23:55:27Z\t30.23\t-97.79\t22847\n0\t2010-10-18T22:17:43Z\t30.26\t-97.76\t420\n",
        "column 3 holds fractions.*--columns",
        Reading({"item": "5"}),
        {"0": ["420", "22847"]},
    ),
    "rows that are counted": (
        b"0,196,242,3\n1,186,302,3\n2,196,377,1\n",
        "column 1 counts the rows from 0.*--columns",
        Reading({"user": "2", "item": "3"}),
        {"196": ["242", "377"], "186": ["302"]},
    ),
    "a day of which month": (
        b"user_id,item_id,month,day\n1,2,11,10\n1,3,05,12\n",
        "'day' and 'month' are parts of a time.*--columns time=day .*time=none",
        Reading({"time": "none"}),
        {"1": ["2", "3"]},
    ),
    "an encoding that is no Western one": (
        "user,item\n用户,电影\n".encode("gb18030"),
        "not UTF-8, and no Western text.*--encoding",
        Reading(encoding="gb18030"),
        {"用户": ["电影"]},
    ),
    "two columns of one name": (
        b"user,item,item\nanna,f1,f2\n",
        "--columns item=2",
        Reading({"item": "3"}),
        {"anna": ["f2"]},
    ),
    "ids that may be times": (
        b"anna,1558746218,5\nanna,1558746219,4\n",
        "column 2 may be a time, or ids.*--columns",
        Reading({"user": "1", "item": "2"}),
        {"anna": ["1558746218", "1558746219"]},
    ),
}


@pytest.mark.parametrize(("data", "asked", "answer", "expected"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_is_not_clear_is_refused_with_the_option_that_decides(
    tmp_path: Path, data: bytes, asked: str, answer: Reading, expected: dict[str, list[str]]
) -> None:
    with pytest.raises(InteractionsError, match=asked):
        by_user(data, tmp_path)
    assert by_user(data, tmp_path, answer) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no rows"),
        (b"\n \r\n", "holds no rows"),
        (b",\n,\n", "no columns found"),
        (b"user,item\n", "holds no interactions"),
        (b"user,item\nanna,\n", "left out, 1 without a user or an item .the first in line 2."),
        (b"alone\n", "no columns found"),
        (b"user,item,text\nanna,f1," + b"z" * 200_000, "line 2: 200,008 characters in one line"),
        (b"u1,a\nu2\n", "rows differ in their number of columns: 1 in 1, 2 in 1"),
        (b"a,b,c\nu1,a\nu2,b\nu3,c\n", "line 1: the first row has 3 columns, most of the others"),
        (b"u1,a\x00\n", "no text file"),
        (b"PK\x03\x04....", "a zip archive"),
        (b'{"user": "anna"}\n', "holds JSON"),
        (b"{u'user_id': u'76561', u'items': []}\n" * 2, "holds JSON, or Python's dictionaries"),
        (
            b"user,item\nanna,f1\nitem,user\nf2,anna\n",
            "line 3: the header again, its columns in another order",
        ),
        (gzip.compress(b"user,item\n", mtime=0)[:-9], "packed by gzip, and damaged"),
        (b'"anna","f"1"\n"bert","f2"\n', "cannot be cut into cells: line 1"),
        (b"user,item,date\nanna,f1,soon\nanna,f2,later\n", "'soon', 'later' are no times"),
    ],
)
def test_files_that_are_no_tables_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(InteractionsError, match=message):
        by_user(data, tmp_path)


def test_what_was_understood_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text(
        "userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n1,31,3.0,1260759179\n"
        "2,,3.0,1260759182\n2,10,4.0,835355493\n3,4\n"
    )
    found = read_interactions(path)
    assert [line.replace(str(path), "FILE") for line in found.understood] == [
        "FILE (with a header, separated by comma, utf-8): user = userId, item = movieId, "
        "time = timestamp; not used: rating",
        "3 rows, 2 users, 2 items; each user's in the order of 1996-06-21 to 2009-12-14",
        "left out: rows 1 without a user or an item (the first in line 4), 1 of another number of "
        "columns than 4 (the first in line 6), 1 that repeat a user and an item: the last counts",
    ]


def test_options_that_name_what_is_not_there_are_refused(tmp_path: Path) -> None:
    data = b"user,item\nanna,f1\n"
    for reading, message in (
        (Reading({"user": "who"}), "names 'who'; the first row of .* is user, item"),
        (Reading({"item": "3"}), "names column 3; .* has 2"),
        (Reading({"item": "9" * 5000}), "names column 9+... .* has 2"),
        (Reading(encoding="idna"), "no encoding of text"),
        (Reading({"item": "1"}), "user and item are of one column"),
        (Reading(separator="--"), "expected one character"),
        (Reading(encoding="klingon"), "no encoding of text"),
        (Reading(encoding="ascii"), ""),
    ):
        if message:
            with pytest.raises(InteractionsError, match=message):
                by_user(data, tmp_path, reading)
    with pytest.raises(InteractionsError, match="not in the encoding ascii"):
        by_user("user,item\nzoé,f1\n".encode(), tmp_path, Reading(encoding="ascii"))
    with pytest.raises(InteractionsError, match="not in the encoding utf-7"):
        by_user(b"user,item\n+2AA-,f1\n", tmp_path, Reading(encoding="utf-7"))


@pytest.mark.parametrize(
    ("told", "written"),
    [
        ("utf-8-sig", "utf-8"),
        ("utf-8-sig", "utf-8-sig"),
        ("utf-16", "utf-16"),
        ("utf-16", "utf-16-le"),
        ("UTF_32", "utf-32"),
    ],
)
def test_an_encoding_with_a_mark_is_told(tmp_path: Path, told: str, written: str) -> None:
    data = "user,item\nzoé,f1\n".encode(written)
    assert by_user(data, tmp_path, Reading(encoding=told)) == {"zoé": ["f1"]}
