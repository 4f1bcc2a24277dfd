#include "cli/stories/stories.h"

#include <fmt/format.h>

namespace lockstep::cli {
namespace {

constexpr const char* kStoryGrammar = R"(
table place
  where; the; hobby; finds
  by the grey sea; the beach; sea_hobby; sea_finds
  at the edge of a deep forest; the forest; forest_hobby; forest_finds
  on top of a windy hill; the hill; hill_hobby; hill_finds
  beside a slow brown river; the river; river_hobby; river_finds
  behind the old bakery; the bakery; bakery_hobby; bakery_finds
  under the railway bridge; the bridge; bridge_hobby; bridge_finds
  in the snow of the far north; the ice; north_hobby; north_finds

table sea_finds
  a; the
  a green bottle; the bottle
  a little boat; the boat
  a singing shell; the shell
  a rusty anchor; the anchor
table forest_finds
  a; the
  a glowing mushroom; the mushroom
  a wooden flute; the flute
  a giant acorn; the acorn
  a red umbrella; the umbrella
table hill_finds
  a; the
  a paper kite; the kite
  a fallen star; the star
  a brass telescope; the telescope
  a small cloud; the cloud
table river_finds
  a; the
  a striped paddle; the paddle
  a silver spoon; the spoon
  a tin bucket; the bucket
  a floating hat; the hat
table bakery_finds
  a; the
  a warm loaf; the loaf
  a golden key; the key
  a jar of honey; the jar
  a birthday cake; the cake
table bridge_finds
  a; the
  a blue lantern; the lantern
  a lost suitcase; the suitcase
  a stopped clock; the clock
  an old trumpet; the trumpet
table north_finds
  a; the
  a sledge with one runner; the sledge
  a frozen bell; the bell
  a woollen scarf; the scarf
  an egg as big as a pumpkin; the egg

rule sea_hobby
  count the waves
  build castles of sand
  race the crabs
  listen to the gulls
rule forest_hobby
  climb the tallest trees
  talk to the owls
  jump into piles of leaves
  look for berries
rule hill_hobby
  roll down the grass
  chase the wind
  watch the clouds
  shout and wait for the echo
rule river_hobby
  skip flat stones
  float on {hero.his} back
  splash the ducks
  catch the falling leaves
rule bakery_hobby
  smell the fresh bread
  lick spoons
  draw pictures in the flour
  nibble on crumbs
rule bridge_hobby
  wave at the trains
  sing in the tunnel
  count the wagons
  hop from stone to stone
rule north_hobby
  slide on {hero.his} belly
  build towers of snow
  catch snowflakes
  follow the northern lights

table kind
  kind; part; sound
  fox; tail; yelped
  mouse; whiskers; squeaked
  hedgehog; nose; snuffled
  bear; paws; growled
  otter; whiskers; whistled
  rabbit; ears; whispered
  goat; beard; bleated
  frog; toes; croaked
  badger; claws; grumbled
  duck; feathers; quacked

table hero
  name; he; him; his
  Pip; he; him; his
  Mia; she; her; her
  Otto; he; him; his
  Luna; she; her; her
  Bruno; he; him; his
  Tilly; she; her; her
  Finn; he; him; his
  Rosa; she; her; her
  Jasper; he; him; his
  Nell; she; her; her
  Leo; he; him; his
  Wanda; she; her; her
  Gus; he; him; his
  Ida; she; her; her
  Kasimir; he; him; his
  Dora; she; her; her

table friend
  who; name; he; him; trick
  an old turtle called Moss; Moss; he; him; moss_trick
  a tall heron called Vera; Vera; she; her; vera_trick
  a snail called Zoom; Zoom; he; him; zoom_trick
  a sleepy owl called Edith; Edith; she; her; edith_trick
  a mole called Yorick; Yorick; he; him; yorick_trick
  a bumblebee called Queenie; Queenie; she; her; queenie_trick
  a crow called Ulf; Ulf; he; him; ulf_trick
  a cow called Agatha; Agatha; she; her; agatha_trick

rule moss_trick
  blinked slowly and thought for an hour
  pulled in his head and pulled it out again
  chewed on a leaf
rule vera_trick
  stood on one leg, which always helped
  tilted her long neck
  looked down her beak
rule zoom_trick
  went round in a very small circle
  waved both of his horns
  left a silver line while he was thinking
rule edith_trick
  opened one eye
  yawned so wide that a moth flew in
  turned her head all the way around
rule yorick_trick
  polished his tiny glasses
  scratched a map into the earth
  sneezed some dust away
rule queenie_trick
  buzzed in a low and clever way
  wiped some pollen from her knees
  flew once around the problem
rule ulf_trick
  hopped from foot to foot
  laughed, but kindly
  rattled his box of shiny things
rule agatha_trick
  chewed, and chewed, and chewed
  swung her bell
  looked at the sky for a while

table plot
  what; tell; try; advice; deed; moral
  But it was far too heavy to carry.; heavy_tell; heavy_try; heavy_advice; heavy_deed; heavy_moral
  But it was broken in two.; broken_tell; broken_try; broken_advice; broken_deed; broken_moral
  But a magpie swooped down and stole it.; stolen_tell; stolen_try; stolen_advice; stolen_deed; stolen_moral
  But somebody had written a name on it.; owned_tell; owned_try; owned_advice; owned_deed; owned_moral
  But it was stuck fast in the mud.; stuck_tell; stuck_try; stuck_advice; stuck_deed; stuck_moral
  But it began to cry.; crying_tell; crying_try; crying_advice; crying_deed; crying_moral
  But then a thick fog rolled in, and the way home was gone.; fog_tell; fog_try; fog_advice; fog_deed; fog_moral

rule heavy_try
  {hero.name} pulled until {hero.his} {kind.part} turned red.
  {hero.name} pushed with both shoulders, and slid backwards.
  {Hero.he} tried to roll it, but it only rocked.
rule heavy_tell
  {Thing.the} is heavier than a mountain
  I am strong, but not strong enough
  I cannot lift it
rule heavy_advice
  Heavy things like company. Let us lift it together
  Put a log under it, and push
  Ask everybody, and ask nicely
rule heavy_deed
  They counted to three and lifted, and {thing.the} rose into the air like a feather.
  Ten neighbours came, and {thing.the} was home before the soup was cold.
  With a log for a wheel, {thing.the} rolled all the way home.
rule heavy_moral
  What is too heavy for one is light for two.
  Many paws make a light load.

rule broken_try
  {hero.name} tied it with grass, but the grass tore.
  {hero.name} held the halves together and hoped.
  {Hero.he} licked it, because that helps with most things.
rule broken_tell
  {Thing.the} is in two pieces, and so is my heart
  It was like that when I came
  I do not know how to mend things
rule broken_advice
  I have some glue made of honey and rain
  Nothing is broken that can still be loved
  Then let us mend it, one piece at a time
rule broken_deed
  They worked until the moon was up, and then {thing.the} was whole again.
  They glued {thing.the}, and the crack looked just like a smile.
  They tied it with a ribbon, and now {thing.the} was finer than before.
rule broken_moral
  A mended thing is a thing with a story.
  Patience is the best glue.

rule stolen_try
  {hero.name} ran after it until {hero.his} legs were jelly.
  {hero.name} threw a pine cone, and missed.
  {Hero.he} shouted very rude words at the sky.
rule stolen_tell
  That magpie has taken {thing.the}
  My treasure has flown away
  I only had it for a minute
rule stolen_advice
  Magpies will trade anything for a button
  Let us visit her nest and say please
  She may be lonely. Bring her a biscuit
rule stolen_deed
  They climbed to the nest with a shiny button, and the magpie gave {thing.the} back.
  The magpie was so surprised by the word please that she dropped {thing.the}.
  They shared a biscuit with the magpie, and she said sorry and returned {thing.the}.
rule stolen_moral
  Please is a small word with a long arm.
  Even thieves like to be invited.

rule owned_try
  {hero.name} covered the name with a leaf and looked away.
  {hero.name} read it twice, in case it said {hero.name}.
  {Hero.he} sat on it so that nobody could see.
rule owned_tell
  I want to keep {thing.the}
  It is not mine, and I wish it were
  The name on it is not my name
rule owned_advice
  Somebody is missing it right now
  Take it back, and see what happens
  A thing that is kept in secret gets heavier every day
rule owned_deed
  They knocked at a little round door, and a weasel hugged {thing.the} and wept with joy.
  They brought {thing.the} to a grandmother, who gave them soup and seven stories.
  They put up a sign, and a lost little duckling came to fetch {thing.the}.
rule owned_moral
  Giving back is the best way of finding.
  Honest paws sleep well.

rule stuck_try
  {hero.name} dug with {hero.his} {kind.part}, and got stuck as well.
  {hero.name} pulled, and the mud said glop.
  {Hero.he} told the mud to let go, but mud has no ears.
rule stuck_tell
  The mud will not give it back
  {Thing.the} is stuck, and my feet are cold
  I have pulled all morning
rule stuck_advice
  Wait for the rain, and the mud will turn to soup
  Wiggle it. Never pull what you can wiggle
  Dig a small canal, and let the water do the work
rule stuck_deed
  They wiggled left and they wiggled right, and out came {thing.the} with a pop.
  The rain came, the mud ran off, and {thing.the} floated free.
  They dug a canal, and {thing.the} slid out as smooth as butter.
rule stuck_moral
  Wiggling is wiser than pulling.
  Mud is patient, but friends are more patient.

rule crying_try
  {hero.name} sang to it, but that made it worse.
  {hero.name} told it a joke about a potato.
  {Hero.he} gave it a towel and patted it.
rule crying_tell
  It cries and cries, and I have run out of towels
  {Thing.the} is sad, and I do not know why
  I think that it misses somebody
rule crying_advice
  Have you asked it what is wrong
  Perhaps it is only tired
  Everybody cries. Sit down beside it and wait
rule crying_deed
  They asked, and {thing.the} said that it was afraid of the dark, so they lit a candle.
  They sat beside {thing.the} until it fell asleep, and in the morning it laughed.
  They hugged {thing.the} from both sides, and the crying turned into hiccups.
rule crying_moral
  Listening is the softest kind of help.
  Nobody should cry alone.

rule fog_try
  {hero.name} walked in a circle and met {hero.his} own footprints.
  {hero.name} called hello, and only the fog answered.
  {Hero.he} followed {hero.his} nose, straight into a thorn bush.
rule fog_tell
  I am lost, and I cannot even see my {kind.part}
  The fog has eaten the path
  I want to go home
rule fog_advice
  Close your eyes and listen for {place.the}
  Hold on to me. I never hurry, so I never get lost
  Fog is only a cloud that came to visit
rule fog_deed
  Step by step they walked, and with {thing.the} held high they found the door.
  They sang until the others sang back, and they followed the song home.
  They waited and told jokes, and when the fog had heard enough it left.
rule fog_moral
  Slow and together is faster than quick and lost.
  A friend is a kind of lamp.

rule when
  4* Once upon a time
  2* Long ago
  2* Not so long ago
  When the moon was young
  Before there were any roads
rule mood
  small
  shy
  brave
  cheerful
  clumsy
  hungry
  dreamy
  stubborn
rule day
  3* One morning
  2* One day
  On a rainy Tuesday
  On {hero.his} birthday
  After a long nap
rule walk
  walked along
  went past
  wandered near
  hurried towards
rule look
  It was the finest thing in the world.
  {Hero.he} had never seen anything like it.
  Nobody was looking.
  It smelled of cinnamon.
  "Hello," {kind.sound} {hero.name}.
rule feel
  {Hero.he} sat down and sighed.
  A tear ran down to the tip of {hero.his} nose.
  {Hero.he} was ready to give up.
  The wind seemed to giggle.
rule ask
  Why are you so sad
  What is the matter, little {kind.kind}
  Can I help you
  Who made all that noise
rule joy
  {hero.name} danced until {hero.his} {kind.part} shook.
  "Hooray!" {kind.sound} {hero.name}.
  {hero.name} and {friend.name} laughed for a whole hour.
  {Hero.he} hugged {friend.name} very tightly.
rule end
  From then on they met every day at {place.the}.
  That night {hero.name} slept with {thing.the} beside {hero.him}.
  To thank {friend.him}, {hero.name} cooked a pot of nettle soup.
  And {friend.name} was never lonely again.
rule close
  3* And that was that.
  2* The end.
  Good night.

story
  [when], <place>, there lived a [mood] <kind> named <hero>. {Hero.he} loved to [place.hobby].
  [day], {hero.name} [walk] {place.the} and found <thing:place.finds>. [look] <plot> [plot.try] [feel]
  Then <friend> came along. "[ask]?" asked {friend.name}. "[plot.tell]," said {hero.name}. {Friend.name} [friend.trick]. "[plot.advice]," said {friend.name}.
  [plot.deed] [joy] [end] [plot.moral] [close]
)";

}  // namespace

Grammar story_grammar() { return parse_grammar(kStoryGrammar); }

double story_entropy_per_byte(const Grammar& grammar) {
  const GrammarMeans means = expected(grammar);
  return means.bits / (means.bytes + 1);
}

Documents built_in_stories(std::uint64_t seed, std::uint64_t count) {
  const Grammar grammar = story_grammar();
  Documents stories;
  stories.name = fmt::format("{} built-in stories", count);
  stories.entropy_per_byte = story_entropy_per_byte(grammar);
  for (std::uint64_t i = 0; i < count; ++i) {
    stories.texts.push_back(generate_text(grammar, seed, i).text);
  }
  return stories;
}

}  // namespace lockstep::cli
